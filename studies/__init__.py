"""Questions about tilewise, and what writes its own documents: python -m studies NAME, from a checkout."""
