"""Operations of the REST server, and the state that they share."""
