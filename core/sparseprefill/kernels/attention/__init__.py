"""The portable attention kernel in Triton: forward, repair of nonfinite values, tile mass, and their launches."""
