"""The wire: a warehouse's arena, served to workers on other nodes."""
