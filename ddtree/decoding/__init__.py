"""Real targets and drafters, and the loop that decodes with them."""
