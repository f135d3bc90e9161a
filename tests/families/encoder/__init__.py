"""A family that is no decoder, and no line of Weft that knows it: an encoder that classifies.

Tokens look both ways, except at those that are hidden; a sample's class is read at its first place.
Where none are hidden attention is Weft's own, so that ranks may divide the tokens of a sample.
"""
