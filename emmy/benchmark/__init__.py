"""Every case of a set with every lane in turns: what is run, what is kept, what is told of it. Draws no candidates."""
