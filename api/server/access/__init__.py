"""Who may do what, and how often: connections, tokens, rates, and limits of submitted recipes."""
