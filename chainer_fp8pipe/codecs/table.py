"""The table of codecs: to add one is to add its row."""
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from .codec import BlockScaled, Cast, Codec
from .fp8 import Fp8Paper, Fp8Ratio


@dataclasses.dataclass(frozen=True)
class Row:
    """What others know of a codec without asking for its name.

    Attributes:
        make: Makes it; its dataclass' fields are keywords.
        purpose: What it is for, as ``--help`` and reports say it.
        options: Options of a communicator that only such codecs have; what
            are fields of the codec is passed to it.
        defaults: Options whose default is another one with this codec.
        exact: A mean is rounded no more than float32 does it.
        for_study: To compare with; neither ``bench`` nor ``plan`` tries it.
    """

    make: Callable[..., Codec]
    purpose: str
    options: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    exact: bool = False
    for_study: bool = False

    @functools.cached_property
    def usual(self) -> Any:
        """The codec with its defaults."""
        return self.make()

    @property
    def nbytes(self) -> float:
        """Bytes of an element on the wire."""
        return self.usual.wire_dtype.itemsize / self.usual.grain

    @property
    def error_feedback(self) -> bool:
        """Whether residuals take memory, unless an option switches them off.
        """
        return self.usual.error_feedback

    @property
    def has_sums(self) -> bool:
        """Whether wires can be added up in their own format."""
        return self.usual.wire_dtype.kind != 'V'

    @property
    def sums(self) -> str:
        """What sums travel in: 11 bits lose little beside a byte's 3."""
        return 'float16' if self.nbytes == 1 else 'float32'

    def codec(self, options: Any, rank: int, ranks: int) -> Codec:
        """The codec of a communicator with these options, on one of its ranks.
        """
        given = {**vars(options), 'rank': rank, 'ranks': ranks}
        return self.make(**{
            field.name: given[field.name]
            for field in dataclasses.fields(type(self.usual))
            if field.init and field.name in given and field.name != 'name'})


#: By the communicator's name, from the fewest bytes on.
CODECS: dict[str, Row] = {
    'int4': Row(BlockScaled, 'the slowest links; large models',
                ('warmup', 'error_feedback')),
    'fp8': Row(Fp8Ratio, 'links up to some Gbit/s',
               ('warmup', 'error_feedback', 'period', 'epsilon')),
    'fp8_paper': Row(
        Fp8Paper, 'repeating the paper',
        ('warmup', 'period', 'epsilon', 'quantile', 'samples', 'seed'),
        {'algorithm': 'mpi_op', 'two_level': 'yes', 'bucket_bytes': 0},
        for_study=True),
    'bfloat16': Row(functools.partial(Cast, 'bfloat16'),
                    "float32's range at half the bytes; 8 significant bits"),
    'float16': Row(functools.partial(Cast, 'float16'),
                   'one machine; wants a loss scale'),
    'float32': Row(functools.partial(Cast, 'float32'),
                   'the reference for the others', exact=True),
}
