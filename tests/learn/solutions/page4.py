"""Solutions of page 4's exercises."""

import torch


def in_turns(tiles, multiply, exponentiate):
    schedule = []
    free = {"multiply": 0, "exponentiate": 0}
    done = [0, 0]  # when each group's last task ends
    for tile in range(tiles):
        for group in (0, 1):
            for unit, cycles in (("multiply", multiply), ("exponentiate", exponentiate)):
                start = max(free[unit], done[group])
                free[unit] = done[group] = start + cycles
                schedule.append((unit, group, tile, start))
    return schedule


def pipelined(product, Q, K, V, B_c):
    keys, values = K.split(B_c, 1), V.split(B_c, 1)
    c = Q.shape[-1] ** -0.5
    S = product("S", Q, keys[0].mT) * c
    m = S.amax(-1, keepdim=True)
    P = torch.exp(S - m)
    l, O = P.sum(-1, keepdim=True), torch.zeros_like(Q)
    for j in range(1, len(keys)):
        S = product("S", Q, keys[j].mT) * c
        O = O + product("PV", P, values[j - 1])
        m_new = torch.maximum(m, S.amax(-1, keepdim=True))
        P, alpha, m = torch.exp(S - m_new), torch.exp(m - m_new), m_new
        l, O = alpha * l + P.sum(-1, keepdim=True), alpha * O
    return (O + product("PV", P, values[-1])) / l


def hadamard(X):
    d, h = X.shape[-1], 1
    while h < d:
        a, b = X.unflatten(-1, (-1, 2, h)).unbind(-2)
        X = torch.stack((a + b, a - b), -2).flatten(-3)
        h *= 2
    return X * d**-0.5
