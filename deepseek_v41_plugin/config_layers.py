# SPDX-License-Identifier: Apache-2.0
"""What each backbone layer owns and what it borrows from an earlier layer."""

from dataclasses import dataclass

from .config_fields import ConfigError, Section, shorten


@dataclass(frozen=True)
class LayerPlan:
    """The attention role of one backbone layer.

    ``ratio`` is 0 (window only), 1 or 2 tokens per global row. ``kv_source`` and
    ``index_source`` are the layers whose global KV / index keys and whose top-k are read
    (None at ratio 0; the layer's own index when it is a source). ``restricted`` is set on
    index sources whose scores count only inside the candidate source's blocks.
    ``engram`` is the ordinal among the Engram layers, or None.
    """

    index: int
    ratio: int
    kv_source: int | None
    index_source: int | None
    is_kv_source: bool
    is_index_source: bool
    is_candidate_source: bool
    restricted: bool
    engram: int | None


def _check_ratios(text: Section, ratios: tuple[int, ...], layers: int, stages: int) -> None:
    field = "compress_ratios"
    if any(r in (4, 128) for r in ratios):
        raise text.fail(
            field,
            "ratios 4 and 128 belong to DeepSeek-V4",
            "serve a V4 checkpoint with the engine's own V4 model; V4.1 uses 0, 1 and 2",
        )
    bad = [(i, r) for i, r in enumerate(ratios) if r not in (0, 1, 2)]
    if bad:
        raise text.fail(field, f"entry {bad[0][0]} is {shorten(bad[0][1])}", "use only 0, 1 and 2")
    if len(ratios) != layers + stages:
        raise text.fail(
            field,
            f"{len(ratios)} entries for {layers} layers and {stages} draft stages",
            f"give one per layer and one per draft stage, {layers + stages} in all",
        )
    if any(ratios[layers:]):
        raise text.fail(
            field,
            f"the draft stages have ratios {shorten(list(ratios[layers:]))}",
            "set the last num_nextn_predict_layers entries to 0",
        )


def _check_sources(text: Section, ratios, kv, index, candidate) -> None:
    for field, ids in (("kv_source_layer_ids", kv), ("index_source_layer_ids", index)):
        for layer in ids:
            if ratios[layer] == 0:
                raise text.fail(
                    field,
                    f"layer {layer} has compress_ratios 0 and so no global KV",
                    "remove it from the sources or give it ratio 1 or 2",
                )
    for layer in kv:
        if layer not in index:
            raise text.fail(
                "index_source_layer_ids",
                f"KV source {layer} is not an index source",
                "a new KV source needs its own top-k: add the layer here",
            )
    k_sources = text.integers("index_k_source_layer_ids", kv)
    if k_sources != kv:
        raise text.fail(
            "index_k_source_layer_ids",
            "differs from kv_source_layer_ids",
            "index keys are built from the KV latent: remove the field or make them equal",
        )
    first = next((i for i, r in enumerate(ratios) if r == 1), None)
    if first is not None and first not in kv:
        raise text.fail(
            "kv_source_layer_ids",
            f"the first ratio-1 layer, {first}, is not a KV source",
            f"add {first} here and to index_source_layer_ids, or correct compress_ratios",
        )
    if candidate is None:
        return
    if candidate not in index:
        raise text.fail(
            "candidate_source_layer_id",
            f"layer {candidate} is not an index source",
            "name one of index_source_layer_ids, or null for no candidate filter",
        )
    later = [layer for layer in kv if layer > candidate]
    if later:
        raise text.fail(
            "candidate_source_layer_id",
            f"KV source {later[0]} comes after candidate source {candidate}, whose blocks"
            " would name other rows",
            "make the candidate source the last KV source or a later index source",
        )


def _source(text: Section, field: str, ids: tuple[int, ...], layer: int) -> int:
    found = max((s for s in ids if s <= layer), default=None)
    if found is None:
        raise text.fail(
            field,
            f"layer {layer} has a compress ratio but no source at or before it",
            "add a source or set the layer's compress_ratios entry to 0",
        )
    return found


def plan_layers(
    text: Section,
    ratios: tuple[int, ...],
    kv: tuple[int, ...],
    index: tuple[int, ...],
    candidate: int | None,
    engram: tuple[int, ...],
    layers: int,
    stages: int,
) -> tuple[LayerPlan, ...]:
    """Check the ownership rules and resolve each layer's sources.

    A layer reads the largest source id at or below it; a source must have the ratio of
    each of its readers. Raises ConfigError naming the contradicting field.
    """
    _check_ratios(text, ratios, layers, stages)
    _check_sources(text, ratios[:layers], kv, index, candidate)
    plans = []
    for layer, ratio in enumerate(ratios[:layers]):
        kv_source = index_source = None
        if ratio:
            kv_source = _source(text, "kv_source_layer_ids", kv, layer)
            index_source = _source(text, "index_source_layer_ids", index, layer)
            if ratios[kv_source] != ratio:
                raise ConfigError(
                    text.path("compress_ratios"),
                    f"layer {layer} has ratio {ratio} but reads KV source {kv_source}"
                    f" of ratio {ratios[kv_source]}",
                    "give both one ratio, or make the layer a KV source",
                )
        is_index = layer in index
        plans.append(
            LayerPlan(
                index=layer,
                ratio=ratio,
                kv_source=kv_source,
                index_source=index_source,
                is_kv_source=layer in kv,
                is_index_source=is_index,
                is_candidate_source=layer == candidate,
                restricted=is_index and candidate is not None and layer > candidate,
                engram=engram.index(layer) if layer in engram else None,
            )
        )
    return tuple(plans)
