"""Models and tokenizers by their sources, and the files of a model's weights."""
