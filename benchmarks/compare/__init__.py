"""Results beside others: peers, floors and goals; another commit."""
