"""Exercises, one or two a stage. Fill them in and delete their mark in tests/examples/test_exercises.py, which checks:

python -m pytest -n 0 tests/examples/test_exercises.py
"""


def window(Q, K, V, w):
    """Stage 1. Causal attention in which a query sees itself and the w keys before it, M = N. Gives O."""
    raise NotImplementedError


def merge(O_1, lse_1, O_2, lse_2):
    """Stage 2. The same queries saw two separate sets of keys. Gives O and lse for both sets together.

    O is (heads, M, d) and already divided, lse is (heads, M). Nothing may overflow, for any lse. Split decoding and
    attention over several GPUs rest on this function.
    """
    raise NotImplementedError


def largest_tile(d, fast):
    """Stage 3. The largest power of two B, so that square tiles fit into fast memory of `fast` numbers.

    With B_r = B_c = B it holds Q_i, O_i, K_j, V_j of B rows each, S, and m and l of B rows.
    """
    raise NotImplementedError


def bytes_by_order(M, N, d, size, B):
    """Stage 3. Bytes that slow memory sees in stages 3 and 4, one head: (key tiles outside, query tiles outside).

    Both loops use square tiles of B, and lengths are multiples of B. Count Q, K, V and O, but not m, l and lse; stage
    3 reads and writes O for each key tile, the first one too.
    """
    raise NotImplementedError


def tiles_visited(M, N, B_r, B_c):
    """Stage 4. How many tiles of S causal attention computes, if those with only hidden entries are skipped."""
    raise NotImplementedError


def softcap_gradient(S, dT, cap):
    """Stage 5. Scores are often bent, T = cap tanh(S / cap), before the softmax. Gives dS from dT."""
    raise NotImplementedError


def delta_with_lse(O, dO, dlse):
    """Stage 5. The loss uses lse too, with gradient dlse. Gives the delta with which dS = P (dP - delta) holds."""
    raise NotImplementedError


def grouped(attention, Q, K, V):
    """Stage 6. Grouped queries: Q has G times as many heads as K and V, and heads hG to hG + G - 1 share key head h.

    Gives O of full attention from one call of attention(Q, K, V), which gives (O, lse) and wants equal numbers of
    heads. K and V may not be copied: that would be G times the reads.
    """
    raise NotImplementedError


def programs(heads, M, N, B_r, B_c, processors):
    """Stage 7. The numbers of programs that delta, dkdv and dq launch, and the rounds that dkdv needs.

    In a round each processor runs one program. Gives (delta, dkdv, dq, rounds).
    """
    raise NotImplementedError


def stages_that_fit(B_r, B_c, d, shared, size=2):
    """Stage 8. How many stages of K and V fit into `shared` bytes with a Q tile of B_r rows; barriers are free."""
    raise NotImplementedError
