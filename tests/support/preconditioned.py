"""SOAP, KL-SOAP and Shampoo once more, for one matrix in float64: numpy, no batches, every formula as a paper has it.

Sums of eigenvectors times their eigenvalues stand in place of bases where that is possible, and loops over columns in
place of sorting. So little is computed in the way of the package.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support.decay import decayed, given


def float64(value: Any) -> Any:
    """Return a float64 copy of a tensor or array."""
    return np.asarray(value).astype(np.float64)


class Soap:
    """SOAP of one matrix.

    Args:
        state: the states to start from, by the names of the package; None starts from zeros.
        sides: the sides that have a factor, among those in ``state``.
    """

    def __init__(self, weight, *, state=None, kl=False, lr, weight_decay=0.0, betas, eps, shampoo_beta=0.95, every=1,
                 lagged=True, basis="qr", power=1, nesterov=False, limit=0.0, correct=True, sides="LR",
                 method="decoupled", cautious=False):
        self.w, (rows, cols) = float64(weight), weight.shape
        self.lr, self.weight_decay, self.betas, self.eps, self.beta = lr, weight_decay, betas, eps, shampoo_beta
        self.every, self.lagged, self.basis, self.power = every, lagged, basis, power
        self.kl, self.nesterov, self.limit, self.correct = kl, nesterov, limit, correct
        zero = {"step": 0, "exp_avg": np.zeros((rows, cols)), "exp_avg_sq": np.zeros((rows, cols)),
                "L": np.zeros((rows, rows)), "R": np.zeros((cols, cols)), "Q_L": np.eye(rows), "Q_R": np.eye(cols),
                "eigvals_L": np.ones(rows), "eigvals_R": np.ones(cols)}
        known: dict[str, Any] = {key: float64(value) for key, value in (state or {}).items()}
        # A side without a factor has the basis of its own axes for ever.
        self.learns = [key for key in sides if state is None or key in known]
        self.method, self.cautious = method, cautious
        self.s: dict[str, Any] = {**zero, **known}
        self.t = int(self.s["step"])

    def step(self, grad):
        """Take a step."""
        g = given(self.w, float64(grad), self.weight_decay, self.method)
        self.t += 1
        update = None
        if not self.lagged:
            self._learn(g)
        if not self.lagged or self.t > 1:
            update = self._adam(g, self.t - self.lagged)
        if self.lagged:
            self._learn(g)
        if update is None:
            return
        if self.limit:
            update = update * min(1.0, self.limit / (np.sqrt(np.mean(update**2)) + 1e-7))
        self.w = decayed(self.w, update, lr=self.lr, weight_decay=self.weight_decay, method=self.method,
                         cautious=self.cautious) - self.lr * update

    def _adam(self, g, count):
        s, (b1, b2) = self.s, self.betas
        first, after, second = (1 - b1**count, 1 - b1**(count + 1), 1 - b2**count) if self.correct else (1, 1, 1)
        s["exp_avg"] = b1 * s["exp_avg"] + (1 - b1) * g
        s["exp_avg_sq"] = b2 * s["exp_avg_sq"] + (1 - b2) * (s["Q_L"].T @ g @ s["Q_R"])**2
        momentum = s["exp_avg"] / first
        if self.nesterov:
            momentum = b1 * s["exp_avg"] / after + (1 - b1) * g / first
        scaled = (s["Q_L"].T @ momentum @ s["Q_R"]) / (np.sqrt(s["exp_avg_sq"] / second) + self.eps)
        return s["Q_L"] @ scaled @ s["Q_R"].T

    def _learn(self, g):
        s, (rows, cols) = self.s, g.shape
        new = (1 - self.beta) / (1 - self.beta**self.t) if self.correct else 1 - self.beta
        of: dict[str, Any] = {"L": g @ g.T, "R": g.T @ g}
        if self.kl:
            # The inverse of the other factor as the sum over its eigenvectors.
            inverse: dict[str, Any] = {
                key: sum(np.outer(q, q) / max(value, self.eps)
                         for value, q in zip(s[f"eigvals_{key}"], s[f"Q_{key}"].T, strict=True))
                if key in self.learns else np.eye(len(s[key])) for key in ("L", "R")}
            of = {"L": g @ inverse["R"] @ g.T / cols, "R": g.T @ inverse["L"] @ g / rows}
        for key in self.learns:
            s[key] = (1 - new) * s[key] + new * of[key]
        if (self.t - 1) % self.every == 0:
            for key in self.learns:
                self._renew(key)

    def _renew(self, key):
        s, factor, q = self.s, self.s[key], self.s[f"Q_{key}"]
        if self.t > 1:
            seen = [float(column @ factor @ column) for column in q.T]
            order = sorted(range(len(seen)), key=lambda i: -seen[i])
            q = np.stack([q[:, i] for i in order], 1)
            v = s["exp_avg_sq"]
            s["exp_avg_sq"] = v[order] if key == "L" else v[:, order]
        if self.t == 1 or self.basis == "eigh":
            q = np.linalg.eigh(factor)[1][:, ::-1]
        else:
            for _ in range(self.power):
                q = np.linalg.qr(factor @ q)[0]
        s[f"Q_{key}"] = q
        s[f"eigvals_{key}"] = np.array([column @ factor @ column for column in q.T])


class Shampoo:
    """Shampoo of one matrix, from zeros; ``sides`` are the sides that have a factor."""

    def __init__(self, weight, *, lr, weight_decay=0.0, betas, eps, shampoo_beta=0.95, every=1, grafting=True,
                 summed=False, matrix_eps=1e-6, limit=0.0, correct=True, sides="LR",
                 method="decoupled", cautious=False):
        self.w, (rows, cols) = float64(weight), weight.shape
        self.lr, self.weight_decay, self.betas, self.eps, self.beta = lr, weight_decay, betas, eps, shampoo_beta
        self.every, self.grafting, self.summed, self.matrix_eps = every, grafting, summed, matrix_eps
        self.limit, self.correct, self.sides, self.method, self.cautious = limit, correct, sides, method, cautious
        self.m: Any = np.zeros((rows, cols))
        self.v: Any = np.zeros((rows, cols))
        self.history: list[Any] = []
        self.roots: dict[str, Any] = {"L": np.eye(rows), "R": np.eye(cols)}
        self.t = 0

    def step(self, grad):
        """Take a step. Factors are made of all gradients so far."""
        g, (b1, b2) = given(self.w, float64(grad), self.weight_decay, self.method), self.betas
        self.t += 1
        self.history.append(g)
        self.m, self.v = b1 * self.m + (1 - b1) * g, b2 * self.v + (1 - b2) * g * g
        if (self.t - 1) % self.every == 0:
            self._renew()
        first, second = (1 - b1**self.t, 1 - b2**self.t) if self.correct else (1, 1)
        update = self.roots["L"] @ self.m @ self.roots["R"] / first
        if self.grafting:
            adam = (self.m / first) / (np.sqrt(self.v / second) + self.eps)
            update = update * (float(np.linalg.norm(adam)) / max(float(np.linalg.norm(update)), 1e-300))
        if self.limit:
            update = update * min(1.0, self.limit / (np.sqrt(np.mean(update**2)) + 1e-7))
        self.w = decayed(self.w, update, lr=self.lr, weight_decay=self.weight_decay, method=self.method,
                         cautious=self.cautious) - self.lr * update

    def _renew(self):
        ages = range(self.t - 1, -1, -1)
        weights = [1.0] * self.t if self.summed else [(1 - self.beta) * self.beta**age for age in ages]
        if self.correct and not self.summed:
            weights = [weight / (1 - self.beta**self.t) for weight in weights]
        factors: dict[str, Any] = {
            "L": sum(w * g @ g.T for w, g in zip(weights, self.history)),
            "R": sum(w * g.T @ g for w, g in zip(weights, self.history))}
        for key in self.sides:
            values, vectors = np.linalg.eigh(factors[key])
            order = -1 / (2 * len(self.sides))
            if values.max() <= 0:
                self.roots[key] = np.eye(len(values))
                continue
            values = np.maximum(values, 0) + self.matrix_eps * values.max()
            self.roots[key] = sum(np.outer(q, q) * value**order for value, q in zip(values, vectors.T, strict=True))
