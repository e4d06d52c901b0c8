"""Loads a head of multi-token prediction out of its target's own checkpoint, beside the target."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from cadenza_common.brief import brief
from executor_svc.config import ExecutorConfig
from executor_svc.device.interface import Device
from executor_svc.models.base import WeightSource
from executor_svc.models.decoder import Decoder, attention_shape
from executor_svc.models.decoder_loading import check_memory, open_weights
from executor_svc.models.files.checkpoint import SafetensorsWeights
from executor_svc.models.files.named_weights import Weights
from executor_svc.models.files.stored_names import decoder_names
from executor_svc.models.folder import LoaderError, find_weights
from executor_svc.models.heads.draft import LoadedDraft, draft_config, layers_of, naming, own_few_bits, probe
from executor_svc.models.heads.mtp import MtpHead, MtpWeights
from executor_svc.models.heads.mtp_form import HIDDEN_NORM, INPUT, LAYER, MTP_FORMS, NORM, TOKEN_NORM, MtpForm
from executor_svc.models.heads.named_tensors import NamedTensors
from executor_svc.models.layers.rope import make_rotary
from executor_svc.models.loading import LoadedModel
from executor_svc.models.opened import Checkpoint, open_checkpoint
from executor_svc.models.quantized.round_to_nearest import RoundedSource, rounded_bytes, rounding_of
from executor_svc.models.safetensors_file import tensors_of
from executor_svc.models.specs.spec import MTP_LAYERS_FIELD, DecoderSpec, LayerSpec, linear_shapes
from executor_svc.models.weights.decoder_weights import DecoderWeights
from executor_svc.models.weights.linear_weight import linear_weight

_SUPPORTED = ", ".join(MTP_FORMS)


def has_mtp(config: ExecutorConfig) -> bool:
    """Return whether the checkpoint of --model has a head that `load_mtp` loads; raises LoaderError for no checkpoint.

    A config.json that names one is not enough: tools that quantize or merge models leave its tensors out.
    """
    checkpoint = open_checkpoint(config.model, with_weights=config.load_format != "dummy")
    form = _form_of(checkpoint)
    if form is None or checkpoint.read_spec().num_mtp_layers != 1:
        return False
    return config.load_format == "dummy" or any(name.startswith(form.before) for name in _tensor_names(checkpoint))


def check_mtp(config: ExecutorConfig) -> None:
    """Raise LoaderError, which names --speculative and --model, if that has no head that `load_mtp` loads."""
    _head_spec(config, open_checkpoint(config.model, with_weights=False))


def load_mtp(config: ExecutorConfig, device: Device, target: LoadedModel) -> LoadedDraft[MtpHead]:
    """Load the head in the checkpoint of `config.model` onto the device of its target, in the target's dtype.

    Embedding and head are the target's. Raises LoaderError, which names --speculative and --model, for a model without
    a head, and for a head that is incomplete or not supported; NumericsError as `load_model`.
    """
    checkpoint = open_checkpoint(config.model, with_weights=config.load_format != "dummy")
    (spec, form), config = _head_spec(config, checkpoint), draft_config(config.model, config)
    assert isinstance(target.model, Decoder)
    with naming(config.model, f"--speculative {config.speculative}: --model"), own_few_bits(device) as few_bits:
        weights = open_weights(config, device, checkpoint, spec)
        reader = _MtpReader(spec, form, weights, config, device, target)
        max_model_len = target.geometry.max_model_len
        reader.check(checkpoint.folder, max_model_len)
        with device.loading():
            model = reader.head(max_model_len)
        if isinstance(weights, SafetensorsWeights):
            weights.check_all_used(lambda tensor: not tensor.startswith(form.before))
        weights.refuse_not_finite(f"model folder {checkpoint.folder}")
        probe(config, device)
        layers = layers_of(model, device, weights.num_parameters + reader.num_shared, few_bits)
        return LoadedDraft(model, layers, spec.context_limit, weights.num_parameters)


def _head_spec(config: ExecutorConfig, checkpoint: Checkpoint) -> tuple[DecoderSpec, MtpForm]:
    """Return a decoder that consists of the head's layer, and the head's form.

    Raises LoaderError naming option, model and field.
    """
    model, form = f"--speculative {config.speculative}: {config.model}", _form_of(checkpoint)
    if form is None:
        named = checkpoint.content.get(MTP_LAYERS_FIELD)
        if not named:
            raise _no_head(model, MTP_LAYERS_FIELD, named, checkpoint)
        raise LoaderError(
            f"{model} has no MTP head that is supported ({MTP_LAYERS_FIELD} is {brief(named)}, the "
            f"architecture {', '.join(checkpoint.names) or 'none'}); supported: that of {_SUPPORTED}"
        )
    if not form.layers(checkpoint.content):
        raise _no_head(model, form.count_field, form.layers(checkpoint.content), checkpoint)
    spec = checkpoint.read_spec()
    if spec.num_mtp_layers > 1:
        name, _ = _count_field(form.count_field, checkpoint)
        raise LoaderError(f"{model}: {name} is {spec.num_mtp_layers}: only heads of 1 layer are supported")
    return replace(spec, layers=(_layer_of(spec),)), form


def _layer_of(spec: DecoderSpec) -> LayerSpec:
    """Return a layer with attention; with experts, if layers of the target have such."""
    layer = next(layer for layer in spec.layers if layer.has_attention)
    return replace(layer, experts=next((each.experts for each in spec.layers if each.experts is not None), None))


def _form_of(checkpoint: Checkpoint) -> MtpForm | None:
    """Return the form of the head that files of this architecture may have."""
    form = None if checkpoint.architecture is None else MTP_FORMS.get(checkpoint.architecture)
    return form if form is None or checkpoint.gguf is None else form.in_gguf(checkpoint.read_spec().num_layers)


def _no_head(model: str, name: str, value: object, checkpoint: Checkpoint) -> LoaderError:
    name, where = _count_field(name, checkpoint)
    found = f"is {brief(value)}" if value is not None and checkpoint.gguf is None else f"is not in {where}"
    return LoaderError(f"{model} has no MTP head ({name} {found}); supported: that of {_SUPPORTED}")


def _count_field(name: str, checkpoint: Checkpoint) -> tuple[str, str]:
    """Return what says how many layers a head has, and where; name: of config.json."""
    return (name, "config.json") if checkpoint.gguf is None else ("nextn_predict_layers", "the GGUF file")


def _tensor_names(checkpoint: Checkpoint) -> Iterable[str]:
    """Return the names of all tensors: as the file has them, of a folder as Cadenza has those of decoders."""
    if checkpoint.gguf is not None:
        return checkpoint.gguf.tensors
    found = find_weights(checkpoint.folder)
    return decoder_names(found if isinstance(found, dict) else tensors_of(found))


class _MtpReader:
    """Reads a head's tensors."""

    def __init__(
        self,
        spec: DecoderSpec,
        form: MtpForm,
        weights: Weights,
        config: ExecutorConfig,
        device: Device,
        target: LoadedModel,
    ) -> None:
        self._spec, self._form, self._weights, self._device, self._target = spec, form, weights, device, target
        self.num_shared = 0
        """Parameters of the target that are read once more for the head, after `head`."""
        self._rounding = rounding_of(config, device)
        source: WeightSource = NamedTensors(weights, form.replaced)
        self._source = source if self._rounding is None else RoundedSource(source, self._rounding)
        self._decoder = DecoderWeights(spec, self._source, device)

    def check(self, folder: Path, max_model_len: int) -> None:
        """Raise LoaderError, before memory is taken, if linears are missing or do not fit into memory."""
        linears = list(self._linears())
        elements = sum(rows * columns for _, (rows, columns) in linears)
        held = self._weights.least_bytes(elements, self._form.before)
        if self._rounding is not None:
            held = rounded_bytes(self._rounding, elements)
        tables = self._spec.num_rotary_elements(max_model_len) * self._device.dtype.itemsize
        check_memory(folder, held + tables, "weights and rotary tables", max_model_len, self._device)
        for prefix, shape in linears:
            self._source.open_linear(prefix, shape)

    def _linears(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """Yield the name, as in a decoder, and the shape of each linear that the head has of its own."""
        yield LAYER + INPUT, (self._spec.hidden_size, 2 * self._spec.hidden_size)
        for name, shape in linear_shapes(self._spec):
            if name.startswith(LAYER):
                yield name.removesuffix(".weight"), shape

    def head(self, max_model_len: int) -> MtpHead:
        """Read everything; inside `Device.loading`."""
        spec, device = self._spec, self._device
        assert isinstance(self._target.model, Decoder)
        (layer,) = spec.layers
        ends = self._target.whole_ends(embedding=True, head=True)
        assert ends.embedding is not None
        assert ends.head is not None
        self.num_shared = ends.num_parameters
        rotary = make_rotary(layer.rope, max_model_len, device.dtype, device.torch_device)
        shape = attention_shape(spec, layer, device.kernels)
        hidden_norm, token_norm, norm = (
            self._decoder.norm(LAYER + name, spec.hidden_size) for name in (HIDDEN_NORM, TOKEN_NORM, NORM)
        )
        projection = linear_weight([self._source.open_linear(*next(self._linears()))], device.dtype)
        weights = MtpWeights(
            embedding=ends.embedding,
            hidden_norm=hidden_norm,
            token_norm=token_norm,
            input_proj=device.prepare_linear("mtp.input_proj", projection),
            layer=self._decoder.layer(0, shape, None),
            norm=norm,
            head=ends.head,
            state_norm=self._target.model.final_norm if self._form.reads_normed else None,
            token_first=self._form.token_first,
        )
        return MtpHead(spec, self._target.model.num_layers, weights, shape, rotary, device.kernels)
