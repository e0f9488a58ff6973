# SPDX-License-Identifier: Apache-2.0
"""The prime walk that sizes the Engram hash tables."""

# These bases make Miller-Rabin exact for every n < 3.3e24.
_BASES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41)


def is_prime(n: int) -> bool:
    """Whether the int ``n`` is prime (exact for n < 3.3e24)."""
    if n < 2:
        return False
    for p in _BASES:
        if n % p == 0:
            return n == p
    shift = ((n - 1) & (1 - n)).bit_length() - 1
    odd = (n - 1) >> shift
    for base in _BASES:
        x = pow(base, odd, n)
        if x in (1, n - 1):
            continue
        for _ in range(shift - 1):
            x = x * x % n
            if x == n - 1:
                break
        else:
            return False
    return True


def engram_primes(
    vocab_size: int, layers: int, max_ngram: int, heads: int
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Table sizes ``[layers][max_ngram - 1][heads]``.

    Consecutive primes from ``vocab_size`` upwards; no prime is used twice, so a layer
    goes on where the one before it stopped.
    """
    at = vocab_size - 1

    def following() -> int:
        nonlocal at
        at += 1
        while not is_prime(at):
            at += 1
        return at

    return tuple(
        tuple(tuple(following() for _ in range(heads)) for _ in range(max_ngram - 1))
        for _ in range(layers)
    )
