"""What makes the KV of equal tokens differ, as one string."""

from collections.abc import Iterable


def cache_namespace(*, tenant: str = "", adapter: str = "", salt: str = "", images: Iterable[str] = ()) -> str:
    """A `cache_namespace` for requests: prefixes are reused between requests of which all of this is equal.

    tenant   whoever may not learn, by how fast it is answered, what others have asked
    adapter  the weights that are loaded on top of the model's own (LoRA)
    salt     anything else
    images   content hashes of what stands for placeholder tokens, in order

    Two different calls never give the same string, whatever characters are in it.  Mutates nothing.
    """
    parts = (tenant, adapter, salt, *images)
    return "".join(f"{len(part)}:{part}" for part in parts) if any(parts) or len(parts) > 3 else ""
