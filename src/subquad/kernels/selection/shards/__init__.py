"""What one of several processes computes from its own tokens for clusters that hold the tokens of all of them."""
