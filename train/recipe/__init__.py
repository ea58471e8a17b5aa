"""Recipes in LLaMA-Factory's vocabulary: `read_recipe` checks a file and returns a `Recipe`.

kt_runtime.documents   bytes -> values with their lines (YAML or JSON)
checks       allowed values of one key
fields       the Recipe: honoured keys, defaults, types
others       the keys of other programs, read from configs/recipe_keys.yaml: refused, without effect, synonyms
aliases, kt_config   what synonyms write into the recipe
constraints  rules across several keys
schedules    the settings of transformers' learning-rate schedules
table        all keys with their class; docs/recipes.md is generated from it
"""

from kt_runtime.train.recipe.fields import Recipe
from kt_runtime.train.recipe.reading import read_recipe, read_what_is_right

__all__ = ["Recipe", "read_recipe", "read_what_is_right"]
