"""SharePrefill's offline part: which heads of a model look alike (paper: section 5.2, appendices A.4 and C).

`capture` takes the block maps of a model, `autoencoder` compresses them, `group` clusters the compressed maps into a
ClusterTable, `picture` draws how alike the heads are; `make` is all of it.
"""
