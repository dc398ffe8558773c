"""What several commands share: options, output, exit codes, lookup of recipes."""
