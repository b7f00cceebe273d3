"""What each rank of several does for clusters that hold tokens of all of them."""
