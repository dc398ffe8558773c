"""The service of training calls from outside: sessions, models in training, samplers."""
