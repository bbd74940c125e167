"""Which span rule each head gets: an integer programme over all layers and heads."""

import numpy as np
from torch import Tensor

from ..errors import KVSparseError
from ..policy.heads import ElasticSpanPolicy

RULES_PER_LAYER = 2
_GAP = 0.005  # of the optimum, at which the solver may stop

Rule = tuple[float, float]


def rule_grid(lengths: list[int], block: int) -> list[Rule]:
    """Rules `(alpha, beta)`: beta in eighths, alpha in steps of a quarter of the shortest length (published: 1,024 at 2K to
    8K). Left out are rules that reach beyond the text at some length, or leave nothing at the shortest."""
    step = max(block, lengths[0] // 4 // block * block)
    rules = [(float(alpha), beta / 8) for alpha in range(-lengths[0], lengths[-1] + 1, step) for beta in range(9)]
    spans = {rule: [rule[0] + rule[1] * length for length in lengths] for rule in rules}
    return [rule for rule in rules if spans[rule][0] > 0 and all(s <= n for s, n in zip(spans[rule], lengths, strict=True))]


def costs(influence: dict[int, Tensor], rules: list[Rule], block: int) -> tuple[np.ndarray, np.ndarray]:
    """What each rule masks, `[L, H, R]` (shares of all influence, summed over the lengths), and its density `[lengths, R]`."""
    policy = ElasticSpanPolicy(minimum=2 * block, multiple=block)
    masked, density = 0.0, []
    for length, found in influence.items():
        spans = [min(policy.span((rule,), length), length) for rule in rules]
        density.append([span / length for span in spans])
        beyond = found.flip(-1).cumsum(-1).flip(-1).numpy()  # at or beyond each distance
        beyond = np.concatenate((beyond, np.zeros((*beyond.shape[:2], 1))), axis=-1)
        # The span holds one block of sinks, the query's own block and the distances below it.
        reach = [min(span // block - 1, beyond.shape[-1] - 1) for span in spans]
        masked = masked + beyond[..., reach] / max(float(found.sum()), 1e-30)
    return masked, np.array(density)


def choose_rules(
    influence: dict[int, Tensor], rules: list[Rule], density: float, block: int, time_limit: float = 120.0
) -> tuple[list[list[int]], dict]:
    """The assignment that masks least.

    Args:
        influence: by length, `[L, H, distances]`.
        density: largest mean share of the text inside the spans, at every length.
        time_limit: seconds, after which the best found so far counts.

    Returns:
        the rule's number for every layer and head, and facts: what share of the influence is masked, the bound that the
        solver proved, and the density reached at each length.

    Raises:
        KVSparseError: scipy is missing, or no assignment has that density.
    """
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_array
    except ImportError as error:
        raise KVSparseError("choosing MoA rules needs scipy: pip install 'kvsparse_hf[calibrate]'.") from error
    masked, densities = costs(influence, rules, block)
    layers, heads, number = masked.shape
    chosen_from = layers * heads * number  # x[l, h, r], then y[l, r]: the rule is used in the layer
    x = np.arange(chosen_from).reshape(masked.shape)
    y = chosen_from + np.arange(layers * number).reshape(layers, number)
    size = chosen_from + y.size

    def rows(columns: list[np.ndarray], values: list[np.ndarray], low: float, high: float) -> LinearConstraint:
        row = np.concatenate([np.full(len(c), i) for i, c in enumerate(columns)])
        matrix = coo_array((np.concatenate(values), (row, np.concatenate(columns))), shape=(len(columns), size))
        return LinearConstraint(matrix.tocsr(), low, high)

    one = [x[layer, head] for layer in range(layers) for head in range(heads)]
    used = [np.append(x[layer, :, r], y[layer, r]) for layer in range(layers) for r in range(number)]
    constraints = [
        rows(one, [np.ones(number)] * len(one), 1, 1),
        rows(used, [np.append(np.ones(heads), -float(heads))] * len(used), -np.inf, 0),
        rows(list(y), [np.ones(number)] * layers, 0, RULES_PER_LAYER),
        rows([x.ravel()] * len(densities), [np.tile(d, layers * heads) for d in densities], 0, density * layers * heads + 1e-9),
    ]
    cost = np.concatenate((masked.ravel() / len(influence), np.zeros(y.size)))
    options = {"time_limit": time_limit, "mip_rel_gap": _GAP}
    result = milp(cost, integrality=np.ones(size), bounds=Bounds(0, 1), constraints=constraints, options=options)
    if result.x is None:
        least = densities.min(axis=1).max()
        raise KVSparseError(f"no plan of density {density} was found ({result.message}); the smallest spans alone have {least:.3f}.")
    picked = result.x[:chosen_from].reshape(masked.shape).argmax(-1)
    reached = {int(n): float(d[picked].mean()) for n, d in zip(influence, densities, strict=True)}
    facts = {"masked": float(result.fun), "bound": float(result.mip_dual_bound), "reached": reached}
    return picked.tolist(), facts
