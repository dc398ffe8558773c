"""What changes logits before a token is drawn, and the draw."""
