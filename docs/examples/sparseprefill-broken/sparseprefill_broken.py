"""A plugin whose kernels need a package that is not installed."""

import a_kernel_library_that_nobody_has_installed  # noqa: F401
