"""Ratings for the recipe `recommender`: matrix factorisation of a large, sparse table of users and items.

Keras is imported when it is used, so that a config that names these functions can be checked without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kdist.log import say

if TYPE_CHECKING:
    import keras

_MEAN_RATING = 3.5
_BIAS_STDDEV = 0.4
_DOT_STDDEV = 0.5
_RANK = 4
# Shares of ratings fall as (rank + 50) ** -1.1: a tenth of the users gives four fifths of them, a tenth of the items
# gets three quarters.
_POPULARITY_EXPONENT = 1.1
_POPULARITY_OFFSET = 50


def build_model(
    num_users: int = 200_000, num_items: int = 50_000, dim: int = 16, learning_rate: float = 0.2
) -> keras.Model:
    """rating = weights * (user * item) + user bias + item bias + mean; compiled with Adagrad on the squared error.

    Input: a dict of `user` and `item`, int32 [batch] each, less than `num_users` and `num_items`. Output: float32
    [batch, 1].
    """
    import keras

    from kdist.layers import Embedding

    user = keras.Input((), dtype="int32", name="user")
    item = keras.Input((), dtype="int32", name="item")
    product = keras.layers.Multiply()(
        [Embedding(num_users, dim, name="users")(user), Embedding(num_items, dim, name="items")(item)]
    )
    rating = keras.layers.Add()(
        [
            # A dot product that weighs its terms; its bias is the mean rating.
            keras.layers.Dense(1, kernel_initializer="ones", name="rating")(product),
            Embedding(num_users, 1, embeddings_initializer="zeros", name="user_biases")(user),
            Embedding(num_items, 1, embeddings_initializer="zeros", name="item_biases")(item),
        ]
    )
    model = keras.Model({"user": user, "item": item}, rating, name="recommender")
    # A row's gradient is that of a few of the batch's examples, so it is small: Keras's 0.1 would all but freeze it.
    optimizer = keras.optimizers.Adagrad(learning_rate, initial_accumulator_value=1e-5)
    model.compile(optimizer=optimizer, loss="mse", metrics=[keras.metrics.RootMeanSquaredError(name="rmse")])
    return model


def load_data(
    num_users: int = 200_000,
    num_items: int = 50_000,
    num_ratings: int = 6_144_000,
    num_validation: int = 50_000,
    noise: float = 0.7,
    seed: int = 0,
) -> dict[str, Any]:
    """Ratings made from a known truth, as the data arguments of `fit`: x a dict of int32 [n], y float32 [n, 1].

    rating = mean + user bias + item bias + user factors * item factors + normal noise. A few users rate much and most
    rate little, and so it is with items, as in MovieLens. No model can have an RMSE below `noise`; biases alone come
    to 1.23 times that.

    Prints one line that says what the data is.

    Args:
        noise: standard deviation of the ratings around the truth.
        seed: the same seed gives the same truth and ratings.
    """
    random = np.random.default_rng(seed)
    count = num_ratings + num_validation
    user, item = _draw_ids(random, num_users, count), _draw_ids(random, num_items, count)
    factor_stddev = (_DOT_STDDEV**2 / _RANK) ** 0.25
    rating = _MEAN_RATING + noise * random.standard_normal(count, np.float32)
    rating += _BIAS_STDDEV * random.standard_normal(num_users, np.float32)[user]
    rating += _BIAS_STDDEV * random.standard_normal(num_items, np.float32)[item]
    # One factor after the other, so that no [count, rank] array is made.
    for _ in range(_RANK):
        user_factor, item_factor = (
            factor_stddev * random.standard_normal(length, np.float32) for length in (num_users, num_items)
        )
        rating += user_factor[user] * item_factor[item]
    say(
        f"data      {num_users} users x {num_items} items, {num_ratings} + {num_validation} ratings, "
        f"noise {noise:.2f} (the floor of the RMSE)",
    )
    train, validation = slice(0, num_ratings), slice(num_ratings, None)
    rating = rating[:, np.newaxis]
    return {
        "x": {"user": user[train], "item": item[train]},
        "y": rating[train],
        "validation_data": ({"user": user[validation], "item": item[validation]}, rating[validation]),
    }


def _draw_ids(random: np.random.Generator, num_ids: int, count: int) -> np.ndarray:
    """int32 [count] in 0..`num_ids`, some of them far more often than others; which ones is random."""
    shares = (np.arange(num_ids) + _POPULARITY_OFFSET) ** -_POPULARITY_EXPONENT
    ranks = random.choice(num_ids, count, p=shares / shares.sum())
    return random.permutation(num_ids).astype(np.int32)[ranks]
