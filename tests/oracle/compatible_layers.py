"""Every layer of Keras, on inputs that suit it: what `compatibility` builds models of.

A family is one model: each of its layers reads the same input, and a linear combination of what they all give is the
output. So one fit compares all of them, and the weights below each tell which of them differs.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import layers, ops

Apply = Callable[[Any], Any]

BATCH, STEPS = 8, 3
_EXAMPLES = BATCH * STEPS
_random = np.random.default_rng(5)


@dataclass(frozen=True)
class Family:
    """Layers for one kind of input.

    Args:
        x: the input, `float32`, `int32` or strings of shape `(examples, ...)`.
        layers: how each layer, by the name of its class, is applied to the input.
        draws: the layers draw random numbers.
        long: belongs to `make long`.
    """

    x: np.ndarray
    layers: dict[str, Apply]
    draws: bool = False
    long: bool = False
    targets: np.ndarray = field(default_factory=lambda: _random.normal(size=(_EXAMPLES, 1)).astype(np.float32))

    def present(self) -> dict[str, Apply]:
        """Those of the layers that this version of Keras has."""
        return {name: apply for name, apply in self.layers.items() if hasattr(layers, name)}

    def build(self) -> keras.Model:
        """Compiled, its weights drawn from a fixed seed."""
        keras.utils.set_random_seed(4)
        inputs = layers.Input(self.x.shape[1:], dtype="string" if self.x.dtype == object else self.x.dtype.name)
        heads = []
        for name, apply in self.present().items():
            outputs = apply(inputs)
            flat = layers.Reshape((int(np.prod(outputs.shape[1:])),))(ops.cast(outputs, "float32"))
            heads.append(layers.Dense(1, activation="tanh", name=f"below_{name}")(flat))
        outputs = layers.Average()(heads) if len(heads) > 1 else heads[0]
        model = keras.Model(inputs, outputs)
        model.compile(keras.optimizers.SGD(0.5, momentum=0.9), "mean_squared_error", metrics=["mean_absolute_error"])
        return model


def _floats(*shape: int) -> np.ndarray:
    return _random.normal(size=(_EXAMPLES, *shape)).astype(np.float32)


def _pair(make: Callable[[], Any]) -> Apply:
    """A layer that merges is given the input and its mirror image."""
    return lambda x: make()([x, -x])


def _adapted(layer: Any, data: Any) -> Any:
    layer.adapt(data)
    return layer


def _saved_by_tensorflow(x: Any) -> Any:
    """A model that TensorFlow has saved, as a layer that is not trained."""
    folder = Path(tempfile.gettempdir()) / f"kdist-oracle-{os.getpid()}"
    model = keras.Sequential([layers.Input((6,)), layers.Dense(2, kernel_initializer="ones")])
    model.export(folder, verbose=False)
    try:
        return layers.TFSMLayer(folder, call_endpoint="serve", trainable=False)(x)
    finally:
        shutil.rmtree(folder)


def _of_boxes(x: Any) -> Any:
    boxes = {"boxes": x[:, :2, :4, 0], "labels": x[:, :2, 0, 0]}
    layer = layers.MaxNumBoundingBoxes(1, bounding_box_format="xyxy")
    return layer({"images": x, "bounding_boxes": boxes})["bounding_boxes"]["boxes"]


FEATURES: dict[str, Apply] = {
    "Activation": lambda x: layers.Activation("swish")(x),
    "ActivityRegularization": lambda x: layers.ActivityRegularization(0.01, 0.01)(x),
    "Add": _pair(lambda: layers.Add()),
    "Average": _pair(lambda: layers.Average()),
    "BatchNormalization": lambda x: layers.BatchNormalization(momentum=0.8)(x),
    "Concatenate": _pair(lambda: layers.Concatenate()),
    "Dense": lambda x: layers.Dense(3)(x),
    "Discretization": lambda x: layers.Discretization([-0.5, 0.0, 0.5])(x),
    "Dot": _pair(lambda: layers.Dot(1)),
    "ELU": lambda x: layers.ELU()(x),
    "EinsumDense": lambda x: layers.EinsumDense("ab,bc->ac", output_shape=3, bias_axes="c")(x),
    "Flatten": lambda x: layers.Flatten()(x),
    "GroupNormalization": lambda x: layers.GroupNormalization(2)(x),
    "Identity": lambda x: layers.Identity()(x),
    "InputLayer": lambda x: x,
    "Lambda": lambda x: layers.Lambda(lambda value: value**2)(x),
    "LayerNormalization": lambda x: layers.LayerNormalization()(x),
    "LeakyReLU": lambda x: layers.LeakyReLU()(x),
    "Maximum": _pair(lambda: layers.Maximum()),
    "Minimum": _pair(lambda: layers.Minimum()),
    "Multiply": _pair(lambda: layers.Multiply()),
    "Normalization": lambda x: _adapted(layers.Normalization(), np.arange(12, dtype=np.float32).reshape(2, 6))(x),
    "PReLU": lambda x: layers.PReLU()(x),
    "Pipeline": lambda x: layers.Pipeline([layers.Rescaling(0.5), layers.ReLU()])(x),
    "RMSNormalization": lambda x: layers.RMSNormalization()(x),
    "ReLU": lambda x: layers.ReLU()(x),
    "RepeatVector": lambda x: layers.RepeatVector(2)(x),
    "Rescaling": lambda x: layers.Rescaling(0.5, 0.1)(x),
    "Reshape": lambda x: layers.Reshape((3, 2))(x),
    "Softmax": lambda x: layers.Softmax()(x),
    "SpectralNormalization": lambda x: layers.SpectralNormalization(layers.Dense(3))(x),
    "Subtract": _pair(lambda: layers.Subtract()),
    "UnitNormalization": lambda x: layers.UnitNormalization()(x),
}

DRAWN_FEATURES: dict[str, Apply] = {
    "AlphaDropout": lambda x: layers.AlphaDropout(0.3)(x),
    "Dropout": lambda x: layers.Dropout(0.3)(x),
    "GaussianDropout": lambda x: layers.GaussianDropout(0.3)(x),
    "GaussianNoise": lambda x: layers.GaussianNoise(0.3)(x),
    "SpatialDropout1D": lambda x: layers.SpatialDropout1D(0.3)(layers.Reshape((3, 2))(x)),
    "SpatialDropout2D": lambda x: layers.SpatialDropout2D(0.3)(layers.Reshape((3, 1, 2))(x)),
    "SpatialDropout3D": lambda x: layers.SpatialDropout3D(0.3)(layers.Reshape((3, 1, 1, 2))(x)),
}

SEQUENCES: dict[str, Apply] = {
    "AdaptiveAveragePooling1D": lambda x: layers.AdaptiveAveragePooling1D(2)(x),
    "AdaptiveMaxPooling1D": lambda x: layers.AdaptiveMaxPooling1D(2)(x),
    "AdditiveAttention": _pair(lambda: layers.AdditiveAttention()),
    "Attention": _pair(lambda: layers.Attention(use_scale=True)),
    "AveragePooling1D": lambda x: layers.AveragePooling1D(2)(x),
    "Bidirectional": lambda x: layers.Bidirectional(layers.GRU(2))(x),
    "Conv1D": lambda x: layers.Conv1D(2, 2)(x),
    "Conv1DTranspose": lambda x: layers.Conv1DTranspose(2, 2)(x),
    "Cropping1D": lambda x: layers.Cropping1D(1)(x),
    "DepthwiseConv1D": lambda x: layers.DepthwiseConv1D(2)(x),
    "GRU": lambda x: layers.GRU(2)(x),
    "GRUCell": lambda x: layers.RNN(layers.GRUCell(2))(x),
    "GlobalAveragePooling1D": lambda x: layers.GlobalAveragePooling1D()(x),
    "GlobalMaxPooling1D": lambda x: layers.GlobalMaxPooling1D()(x),
    "GroupQueryAttention": lambda x: layers.GroupQueryAttention(2, 2, 1)(x, x),
    "LSTM": lambda x: layers.LSTM(2, return_sequences=True)(x),
    "LSTMCell": lambda x: layers.RNN(layers.LSTMCell(2))(x),
    "Masking": lambda x: layers.LSTM(2)(layers.Masking(mask_value=0.0)(x)),
    "MaxPooling1D": lambda x: layers.MaxPooling1D(2)(x),
    "MultiHeadAttention": lambda x: layers.MultiHeadAttention(2, 2)(x, x, use_causal_mask=True),
    "Permute": lambda x: layers.Permute((2, 1))(x),
    "RNN": lambda x: layers.RNN(layers.SimpleRNNCell(2))(x),
    "SeparableConv1D": lambda x: layers.SeparableConv1D(2, 2)(x),
    "SimpleRNN": lambda x: layers.SimpleRNN(2)(x),
    "SimpleRNNCell": lambda x: layers.RNN(layers.SimpleRNNCell(2))(x),
    "StackedRNNCells": lambda x: layers.RNN(layers.StackedRNNCells([layers.LSTMCell(2), layers.GRUCell(2)]))(x),
    "TimeDistributed": lambda x: layers.TimeDistributed(layers.Dense(2))(x),
    "UpSampling1D": lambda x: layers.UpSampling1D(2)(x),
    "ZeroPadding1D": lambda x: layers.ZeroPadding1D(1)(x),
}

CATEGORIES: dict[str, Apply] = {
    "CategoryEncoding": lambda x: layers.CategoryEncoding(9, "count")(x),
    "Embedding": lambda x: layers.GlobalAveragePooling1D()(layers.Embedding(9, 3, mask_zero=True)(x)),
    "HashedCrossing": lambda x: layers.HashedCrossing(5)((x[:, :1], x[:, 1:2])),
    "Hashing": lambda x: layers.Hashing(5)(x),
    "IntegerLookup": lambda x: layers.IntegerLookup(vocabulary=[1, 3, 5], output_mode="multi_hot")(x),
    "ReversibleEmbedding": lambda x: _there_and_back(layers.ReversibleEmbedding(9, 3), x),
}

TEXTS: dict[str, Apply] = {
    "StringLookup": lambda x: layers.StringLookup(vocabulary=["a", "c"], output_mode="multi_hot")(x),
    "TextVectorization": lambda x: layers.TextVectorization(split=None, vocabulary=["b", "a"], output_mode="multi_hot")(
        x[:, :1]
    ),
}

IMAGES: dict[str, Apply] = {
    "AdaptiveAveragePooling2D": lambda x: layers.AdaptiveAveragePooling2D(2)(x),
    "AdaptiveMaxPooling2D": lambda x: layers.AdaptiveMaxPooling2D(2)(x),
    "AutoContrast": lambda x: layers.AutoContrast(value_range=(0, 1))(x),
    "AveragePooling2D": lambda x: layers.AveragePooling2D(2)(x),
    "CenterCrop": lambda x: layers.CenterCrop(4, 4)(x),
    "ContrastLimitedAdaptiveHistogramEqualization": lambda x: layers.ContrastLimitedAdaptiveHistogramEqualization(
        value_range=(0, 1), tile_grid_size=(2, 2)
    )(x),
    "Conv2D": lambda x: layers.Conv2D(2, 3)(x),
    "Conv2DTranspose": lambda x: layers.Conv2DTranspose(2, 3)(x),
    "Cropping2D": lambda x: layers.Cropping2D(1)(x),
    "DepthwiseConv2D": lambda x: layers.DepthwiseConv2D(3)(x),
    "MaxNumBoundingBoxes": _of_boxes,
    # By itself, Keras leaves it out of a functional model.
    "Equalization": lambda x: layers.Pipeline([layers.Equalization(value_range=(0, 1)), layers.Identity()])(x),
    "GlobalAveragePooling2D": lambda x: layers.GlobalAveragePooling2D()(x),
    "GlobalMaxPooling2D": lambda x: layers.GlobalMaxPooling2D()(x),
    "MaxPooling2D": lambda x: layers.MaxPooling2D(2)(x),
    "Resizing": lambda x: layers.Resizing(4, 6)(x),
    "SeparableConv2D": lambda x: layers.SeparableConv2D(2, 3)(x),
    "UpSampling2D": lambda x: layers.UpSampling2D(2)(x),
    "ZeroPadding2D": lambda x: layers.ZeroPadding2D(1)(x),
}

_RANGE = (0, 1)
DRAWN_IMAGES: dict[str, Apply] = {
    "AugMix": lambda x: layers.AugMix(_RANGE, num_chains=2)(x),
    "CutMix": lambda x: layers.CutMix()(x),
    "MixUp": lambda x: layers.MixUp()(x),
    "RandAugment": lambda x: layers.RandAugment(_RANGE)(x),
    "RandomBrightness": lambda x: layers.RandomBrightness(0.2, _RANGE)(x),
    "RandomColorDegeneration": lambda x: layers.RandomColorDegeneration(0.5, _RANGE)(x),
    "RandomColorJitter": lambda x: layers.RandomColorJitter(_RANGE, 0.2, 0.2, 0.2, 0.2)(x),
    "RandomContrast": lambda x: layers.RandomContrast(0.2, _RANGE)(x),
    "RandomCrop": lambda x: layers.RandomCrop(4, 4)(x),
    "RandomElasticTransform": lambda x: layers.RandomElasticTransform(0.5, value_range=_RANGE)(x),
    "RandomErasing": lambda x: layers.RandomErasing(value_range=_RANGE)(x),
    "RandomFlip": lambda x: layers.RandomFlip()(x),
    "RandomGaussianBlur": lambda x: layers.RandomGaussianBlur(value_range=_RANGE)(x),
    "RandomGrayscale": lambda x: layers.RandomGrayscale()(x),
    "RandomHue": lambda x: layers.RandomHue(0.2, _RANGE)(x),
    "RandomInvert": lambda x: layers.RandomInvert(value_range=_RANGE)(x),
    "RandomPerspective": lambda x: layers.RandomPerspective()(x),
    "RandomPosterization": lambda x: layers.RandomPosterization(4, _RANGE)(x),
    "RandomRotation": lambda x: layers.RandomRotation(0.1)(x),
    "RandomSaturation": lambda x: layers.RandomSaturation(0.2, _RANGE)(x),
    "RandomSharpness": lambda x: layers.RandomSharpness(0.5, _RANGE)(x),
    "RandomShear": lambda x: layers.RandomShear(0.1, 0.1)(x),
    "RandomTranslation": lambda x: layers.RandomTranslation(0.1, 0.1)(x),
    "RandomZoom": lambda x: layers.RandomZoom(0.1)(x),
    "Solarization": lambda x: layers.Solarization(value_range=_RANGE)(x),
}

VOLUMES: dict[str, Apply] = {
    "AdaptiveAveragePooling3D": lambda x: layers.AdaptiveAveragePooling3D(2)(x),
    "AdaptiveMaxPooling3D": lambda x: layers.AdaptiveMaxPooling3D(2)(x),
    "AveragePooling3D": lambda x: layers.AveragePooling3D(2)(x),
    "Conv3D": lambda x: layers.Conv3D(2, 2)(x),
    "Conv3DTranspose": lambda x: layers.Conv3DTranspose(2, 2)(x),
    "ConvLSTM1D": lambda x: layers.ConvLSTM1D(2, 2)(layers.Reshape((4, 16, 2))(x)),
    "ConvLSTM2D": lambda x: layers.ConvLSTM2D(2, 2)(x),
    "ConvLSTM3D": lambda x: layers.ConvLSTM3D(2, 2)(layers.Reshape((2, 2, 4, 4, 2))(x)),
    "Cropping3D": lambda x: layers.Cropping3D(1)(x),
    "GlobalAveragePooling3D": lambda x: layers.GlobalAveragePooling3D()(x),
    "GlobalMaxPooling3D": lambda x: layers.GlobalMaxPooling3D()(x),
    "MaxPooling3D": lambda x: layers.MaxPooling3D(2)(x),
    "UpSampling3D": lambda x: layers.UpSampling3D(2)(x),
    "ZeroPadding3D": lambda x: layers.ZeroPadding3D(1)(x),
}

SOUNDS: dict[str, Apply] = {
    "MelSpectrogram": lambda x: layers.MelSpectrogram(
        fft_length=32, sequence_stride=16, num_mel_bins=4, sampling_rate=200
    )(x),
    "STFTSpectrogram": lambda x: layers.STFTSpectrogram(frame_length=16)(layers.Reshape((64, 1))(x)),
}


def _there_and_back(layer: Any, x: Any) -> Any:
    return layer(layer(x), reverse=True)


FAMILIES: dict[str, Family] = {
    "features": Family(_floats(6), FEATURES, long=True),
    "sequences": Family(_floats(4, 3), SEQUENCES, long=True),
    "categories": Family(_random.integers(0, 9, (_EXAMPLES, 4)).astype(np.int32), CATEGORIES),
    "texts": Family(_random.choice(np.array(["a", "b", "c"], dtype=object), (_EXAMPLES, 3)), TEXTS, long=True),
    "images": Family(_random.uniform(size=(_EXAMPLES, 8, 8, 3)).astype(np.float32), IMAGES, long=True),
    "saved": Family(_floats(6), {"TFSMLayer": _saved_by_tensorflow}, long=True),
    "volumes": Family(_floats(4, 4, 4, 2), VOLUMES, long=True),
    "sounds": Family(_floats(64), SOUNDS, long=True),
    "drawn features": Family(_floats(6), DRAWN_FEATURES, draws=True, long=True),
    "drawn images": Family(
        _random.uniform(size=(_EXAMPLES, 8, 8, 3)).astype(np.float32), DRAWN_IMAGES, draws=True, long=True
    ),
}
