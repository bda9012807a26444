"""What a call is made of: masks, scores, layouts, products, origins, angles, dropout. Of ours it imports
program/ alone."""
