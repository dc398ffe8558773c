"""External stages: sessions of the programs that run them, and the accounting of their time."""
