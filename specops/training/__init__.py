"""Training an EAGLE draft head on text that the target writes itself.

Data flow: :mod:`chat` turns a chat template into scripts, :mod:`generate` lets the target write whole conversations,
:mod:`data` stores them and picks the draft vocabulary, :mod:`bank` keeps the target's hidden states of them,
:mod:`train` fits a head on those, and :mod:`evaluate` measures what share of its guesses the target would accept.
:mod:`dense` holds the forwards they share: plain tensors without pages, equal to the paged forwards of
:mod:`specops.models` on the same weights.
"""
