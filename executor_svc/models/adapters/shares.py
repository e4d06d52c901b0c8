"""A rank's part of a LoRA adapter: of column-parallel linears rows of b, of row-parallel ones columns of a."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from executor_svc.device.ranks import Share
from executor_svc.models.adapters.adapter import Adapter, EmbeddingPart, LoraPart, TokenRows
from executor_svc.models.adapters.modules import Module, decoder_modules
from executor_svc.models.files.stored_order import row_order
from executor_svc.models.parallel.split import part_of, spec_of
from executor_svc.models.specs.spec import DecoderSpec

_RECURRENT = "recurrent.in"


def own_adapter(adapter: Adapter, spec: DecoderSpec, share: Share) -> Adapter:
    """Return what a rank's linears and tables need of an adapter; spec: of the whole model.

    Of tables by token these are the rows of this rank's tokens, which its tables count from 0 on.
    """
    if share.size == 1:
        return adapter
    modules, tokens = decoder_modules(spec_of(spec, share)), share.of(spec.vocab_size)
    linears = {
        use: tuple(own for part in parts for own in _own_parts(part, spec, share, modules))
        for use, parts in adapter.linears.items()
    }
    table = adapter.embedding
    if table is not None:
        table = EmbeddingPart(table.a[tokens.start : tokens.stop].contiguous(), table.b, table.scale)
    rows = (_own_rows(each, tokens) for each in (adapter.embedding_rows, adapter.head_rows))
    embedding_rows, head_rows = rows
    return replace(adapter, linears=linears, embedding=table, embedding_rows=embedding_rows, head_rows=head_rows)


def own_columns(module: Module, spec: DecoderSpec, share: Share) -> list[int]:
    """Return the columns that a rank's linear has of a module, one number for each part of an adapter."""
    part = part_of(module.name, spec, share)
    if share.size == 1 or part is None or part.of_columns:
        return [module.shape[0]]
    sizes = [len(rows) for rows in part.ranges]
    return [sum(sizes)] if module.stored_rows and module.linear == _RECURRENT else sizes


def _own_parts(part: LoraPart, spec: DecoderSpec, share: Share, modules: Mapping[str, Module]) -> Iterator[LoraPart]:
    """Yield a rank's parts of one pair; modules: of its decoder."""
    own = part_of(part.module, spec, share)
    if own is None:
        yield part
    elif own.of_columns:
        (columns,) = own.ranges
        yield replace(part, a=part.a[:, columns.start : columns.stop].contiguous())
    elif modules[part.module].stored_rows and modules[part.module].linear == _RECURRENT:
        yield replace(part, b=_own_by_head(part, own.ranges, spec, modules), first_row=modules[part.module].first_row)
    else:
        first = modules[part.module].first_row
        for rows in own.ranges:
            yield replace(part, b=part.b[rows.start : rows.stop].contiguous(), first_row=first)
            first += len(rows)


def _own_by_head(part: LoraPart, ranges: Iterable[range], spec: DecoderSpec, modules: Mapping[str, Module]) -> Tensor:
    """Return a rank's rows of b where files have rows by head; ranges: of the file's rows."""
    stored = torch.empty_like(part.b)
    stored[row_order(decoder_modules(spec)[part.module].stored_rows)] = part.b
    cut = torch.cat([stored[rows.start : rows.stop] for rows in ranges])
    return cut[row_order(modules[part.module].stored_rows)].contiguous()


def _own_rows(rows: TokenRows | None, tokens: range) -> TokenRows | None:
    if rows is None:
        return None
    own = (rows.token_ids >= tokens.start) & (rows.token_ids < tokens.stop)
    return TokenRows(rows.token_ids[own] - tokens.start, rows.rows[own]) if bool(own.any()) else None
