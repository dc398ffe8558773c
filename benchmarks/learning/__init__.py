"""What runs learn under settings and seeds; hours each."""
