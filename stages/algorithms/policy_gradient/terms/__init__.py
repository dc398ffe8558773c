"""Terms of losses and rewards that several algorithms share: their options and formulas."""
