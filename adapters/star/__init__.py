"""Star Attention over several processes: a Hugging Face model whose context is spread over the ranks of a group."""

from .api import Context, Star
from .ranks import RankError

__all__ = ["Context", "RankError", "Star"]
