"""Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685): a frozen model, of which only small
matrices are trained.

options ▸ names of layers and matrices ▸ training: put into a model by peft ▸ export: merged, or as
peft's files
"""
