"""What a call is made of: masks, scores, layouts, products, origins, angles, dropout. It imports nothing of ours."""
