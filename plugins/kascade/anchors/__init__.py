"""Kascade's offline part: which layers of a model choose keys for the others, and which heads are alike.

`capture` takes the sums of attention of every layer of a model, `choose` compares them and picks the layers, `make`
makes an AnchorTable of it.
"""
