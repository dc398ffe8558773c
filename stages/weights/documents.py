"""Names of documents in a run's index by which trainer and engines agree about versions. It imports nothing."""


def damaged(version: int) -> str:
    """Returns the key of the document that names the worker which has found ``version`` damaged; empty once the trainer has
    published it again."""
    return f"damaged:{version}"


def done_with(worker: str) -> str:
    """Returns the key of the document that holds the last version that ``worker`` has taken and will need."""
    return f"has-last-weights:{worker}"
