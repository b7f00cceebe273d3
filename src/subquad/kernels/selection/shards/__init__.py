"""The computations of one of several processes, on its own tokens, for clusters with the tokens of all of them."""
