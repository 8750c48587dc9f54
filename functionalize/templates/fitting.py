"""An integer of several recordings as a function of the sizes of their arguments.

    fit([(8,), (12,), (20,)], (17, 25, 41))     2*s0 + 1
    fit([(8,), (9,), (12,)], (4, 4, 6))         s0//2
    fit([(8,), (12,), (20,)], (64, 144, 401))   None

Tried in this order: a constant, a multiple of a size or of a product of two or three, the same with a summand, two of
them with a summand (of products of two at most), the same where a division leaves no remainder, then `//` and `%` by
small numbers.
Invariants: arithmetic is exact. `fit` returns a function only if the recordings determine it, that is if no other
function of its form fits them all, and if at least one recording more than it has unknowns agrees. Where all recordings
leave one remainder, such as lengths that are padded to multiples of 8, they determine it for sizes that leave it, too,
and for no others (`Formula.rest`). `line` returns one that a further recording or comparison must confirm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import combinations, combinations_with_replacement

Sizes = tuple[int, ...]
Factors = tuple[int, ...]  # the numbers of the sizes that are multiplied
_DIVISORS = range(2, 9)
_FEW = 4  # sizes that vary, of which more forms are tried
_VERY_MANY = 32  # of which sums and products are not tried
_MOST_FACTORS = 3  # batch, height and width
_FEWEST_OF_ONE_REST = 5  # recordings: with fewer, one of another remainder is awaited
_MANY = 6  # recordings, between whose sizes divisions by small numbers and by larger ones may give the same
_LARGEST_EXACT = 64**2  # by which a product is divided, as patches of images do


@dataclass(frozen=True, slots=True)
class Formula:
    """`constant + sum(coefficient * product)`, then `% divisor`, or `scale * (it // divisor) + summand`.

    terms: pairs (coefficient, factors). operator: "", "//" or "%".
    """

    constant: int
    terms: tuple[tuple[int, Factors], ...] = ()
    operator: str = ""
    divisor: int = 1
    scale: int = 1
    summand: int = 0

    def value(self, sizes: Sizes) -> int:
        """The integer for these sizes."""
        total = self._total(sizes)
        if self.operator == "%":
            return total % self.divisor
        return self.scale * (total // self.divisor) + self.summand if self.operator else total

    def rest(self, sizes: Sizes) -> int:
        """The remainder that the division leaves; 0 if there is no division."""
        return self._total(sizes) % self.divisor

    @property
    def symbols(self) -> frozenset[int]:
        """The numbers of the sizes of which it is a function."""
        return frozenset(i for _, factors in self.terms for i in factors)

    def _total(self, sizes: Sizes) -> int:
        return self.constant + sum(c * _product(sizes, factors) for c, factors in self.terms)

    def __str__(self) -> str:
        parts = [
            "*".join([*([str(c)] if c != 1 else []), *(f"s{i}" for i in factors)])
            for c, factors in self.terms
        ]
        if self.constant or not parts:
            parts.append(str(self.constant))
        text = " + ".join(parts).replace("+ -", "- ")
        if self.operator:
            text = f"{f'({text})' if len(parts) > 1 else text}{self.operator}{self.divisor}"
        text = text if self.scale == 1 else f"{self.scale}*({text})"
        return f"{text} + {self.summand}" if self.summand else text


def evaluator(formulas: Sequence[Formula], symbols: int) -> Callable[..., tuple[int, ...]]:
    """A compiled function from the sizes, each an argument, to the values of all formulas."""
    names = ", ".join(f"s{i}" for i in range(symbols))
    found: Callable[..., tuple[int, ...]] = eval(
        f"lambda {names}: ({''.join(f'{each}, ' for each in formulas)})"
    )
    return found


def fit(sizes: Sequence[Sizes], values: Sequence[int]) -> Formula | None:
    """The function of the sizes that has these values; None if there is none, or if several have them."""
    if len(set(values)) == 1:
        return Formula(values[0])
    if len(sizes[0]) > _FEW:
        return _fit_of_many(sizes, values)
    products = _products(sizes)
    few = {factors: column for factors, column in products.items() if len(factors) < _MOST_FACTORS}
    divided: list[Formula] = []
    for forms in (_multiples(products), _sums(products, 1), _sums(few, 2)):
        found = [f for f in (_solved(form, values) for form in forms) if f is not None]
        whole = [f for f in found if not f.operator]
        if whole:
            return whole[0] if len(whole) == 1 else None
        divided = divided or found
    if divided and len(values) >= _FEWEST_OF_ONE_REST:
        return divided[0] if len(divided) == 1 else None
    found = list(dict.fromkeys([*_floors(few, values), *_remainders(few, values)]))
    if len(values) >= _MANY and found:
        least = min(each.divisor for each in found)
        found = [each for each in found if each.divisor == least]
    return found[0] if len(found) == 1 else None


def _fit_of_many(sizes: Sequence[Sizes], values: Sequence[int]) -> Formula | None:
    """The same where many sizes vary: a multiple of one, of the sum of some that follow each other, or of the product
    of two, perhaps with a summand; of very many only the first.
    """
    alone = _directions(tuple(sizes)).get(_direction(values), ())
    found = [f for i in alone if (f := _on_line(sizes, [(i,)], values)) is not None]
    if found or len(sizes[0]) > _VERY_MANY:
        return found[0] if len(found) == 1 else None
    numbers = range(len(sizes[0]))
    sums = [[(i,) for i in range(a, b + 1)] for a, b in combinations(numbers, 2)]
    products = [[pair] for pair in combinations_with_replacement(numbers, 2)]
    for forms in (sums, products):
        found = [f for each in forms if (f := _on_line(sizes, each, values)) is not None]
        if found:
            return found[0] if len(found) == 1 else None
    return None


@lru_cache(maxsize=4)
def _directions(sizes: tuple[Sizes, ...]) -> dict[tuple[int, ...], list[int]]:
    """The numbers of the sizes, by the direction in which each varies."""
    found: dict[tuple[int, ...], list[int]] = {}
    for number, column in enumerate(zip(*sizes, strict=True)):
        found.setdefault(_direction(column), []).append(number)
    return found


def _direction(values: Sequence[int]) -> tuple[int, ...]:
    """Equal for two columns of integers if one is a multiple of the other, with a summand."""
    steps = [value - values[0] for value in values]
    scale = math.gcd(*steps) or 1
    scale = scale if next((step for step in steps if step), 1) > 0 else -scale
    return tuple([step // scale for step in steps])


def _on_line(
    sizes: Sequence[Sizes], terms: Sequence[Factors], values: Sequence[int]
) -> Formula | None:
    column = [sum(_product(each, factors) for factors in terms) for each in sizes]
    low, high = column.index(min(column)), column.index(max(column))
    if len(set(column)) < 3:  # one more than it has unknowns
        return None
    slope, rest = divmod(values[high] - values[low], column[high] - column[low])
    constant = values[low] - slope * column[low]
    if rest or any(slope * p + constant != v for p, v in zip(column, values, strict=True)):
        return None
    return Formula(constant, tuple((slope, factors) for factors in terms))


def line(sizes: Sequence[Sizes], values: Sequence[int]) -> Formula | None:
    """The function of one size that has these values in two recordings, as far as two can tell; None: there is none.

    A multiple of the size, of its square or cube; else the line through both values, which nothing confirms yet.
    """
    (low,), (high,) = sizes
    first, second = values
    if first == second:
        return Formula(first)
    for count in range(1, _MOST_FACTORS + 1):
        slope, rest = divmod(first, low**count)
        if not rest and slope * high**count == second:
            return Formula(0, ((slope, (0,) * count),))
    slope, rest = divmod(second - first, high - low) if low != high else (0, 1)
    return None if rest else Formula(first - slope * low, ((slope, (0,)),))


def _product(sizes: Sizes, factors: Factors) -> int:
    return math.prod(sizes[i] for i in factors)


def _products(sizes: Sequence[Sizes]) -> dict[Factors, tuple[int, ...]]:
    """Each size and each product of up to `_MOST_FACTORS`, with its value in every recording."""
    numbers = range(len(sizes[0]))
    counts = range(1, _MOST_FACTORS + 1)
    factors = [f for count in counts for f in combinations_with_replacement(numbers, count)]
    return {each: tuple(_product(s, each) for s in sizes) for each in factors}


_Form = dict[Factors, Sequence[int]]  # the unknown coefficients; () is the constant


def _multiples(products: dict[Factors, tuple[int, ...]]) -> Iterator[_Form]:
    for factors, column in products.items():
        yield {factors: column}


def _sums(products: dict[Factors, tuple[int, ...]], terms: int) -> Iterator[_Form]:
    for chosen in combinations(products, terms):
        yield {
            **{factors: products[factors] for factors in chosen},
            (): [1] * len(products[chosen[0]]),
        }


def _solved(form: _Form, values: Sequence[int]) -> Formula | None:
    """The function of this form that has these values, divided if a coefficient is a fraction; None: there is none,
    or too few values.
    """
    unknowns = len(form)
    if unknowns >= len(values):
        return None
    columns = [*form.values(), values]
    rows = [[Fraction(column[i]) for column in columns] for i in range(len(values))]
    for at in range(unknowns):  # Gauss and Jordan
        pivot = next((r for r in rows[at:] if r[at]), None)
        if pivot is None:
            return None
        rows.remove(pivot)
        pivot = [x / pivot[at] for x in pivot]
        rows = [[x - r[at] * p for x, p in zip(r, pivot, strict=True)] for r in rows]
        rows.insert(at, pivot)
    found = [r[-1] for r in rows[:unknowns]]
    divisor = math.lcm(*(x.denominator for x in found))
    if any(r[-1] for r in rows[unknowns:]) or divisor > _LARGEST_EXACT:
        return None
    coefficients = dict(zip(form, (int(x * divisor) for x in found), strict=True))
    constant = coefficients.pop((), 0)
    terms = tuple((c, factors) for factors, c in coefficients.items() if c)
    return Formula(constant, terms, "//" if divisor > 1 else "", divisor)


def _floors(products: dict[Factors, tuple[int, ...]], values: Sequence[int]) -> Iterator[Formula]:
    """Every `m*((c*p + a)//d) + b`, in lowest terms; m is the greatest common divisor of the differences."""
    scale = math.gcd(*(v - values[0] for v in values))
    summand = values[0] % scale
    values = [(v - summand) // scale for v in values]
    for factors, column in products.items():
        low, high = column.index(min(column)), column.index(max(column))
        if column[low] == column[high] or len(values) < 4:
            continue
        slope = Fraction(values[high] - values[low], column[high] - column[low])
        for divisor in _DIVISORS:
            middle = round(slope * divisor)
            for c in range(middle - 1, middle + 2):
                rest = [divisor * v - c * p for v, p in zip(values, column, strict=True)]
                for a in range(max(rest), min(rest) + divisor):
                    if math.gcd(c, divisor) == 1:
                        yield Formula(a, ((c, factors),), "//", divisor, scale, summand)


def _remainders(
    products: dict[Factors, tuple[int, ...]], values: Sequence[int]
) -> Iterator[Formula]:
    """Every `(c*p + a)%d` with c = 1 or -1."""
    if len(values) < 5 or min(values) < 0:
        return
    for factors, column in products.items():
        for divisor in _DIVISORS:
            for c in (1, -1):
                a = (values[0] - c * column[0]) % divisor
                formula = Formula(a, ((c, factors),), "%", divisor)
                if all((c * p + a) % divisor == v for p, v in zip(column, values, strict=True)):
                    yield formula
