"""What the connector of any engine needs. Nothing here knows a certain engine.

To write a connector, adapt the engine's hooks to these:

- Both sides: read the engine's configuration into an ``EngineSetup`` (``setup.py``), or into
  ``Inert`` if it cannot be served. Name the weights with ``weights.begin``. Run every hook in a
  ``Boundary``, so that a defect of kvass is a miss.
- Scheduler: show requests, steps and blocks as ``protocols.py`` says, and tell a ``Planner`` of
  them. Carry its ``StepWork`` to the workers and the workers' reports back. Let the engine compute
  the tokens of a failed load. Tell it before weights are replaced (``Planner.noted``).
- Each worker: show the KV pages as ``KVMemory`` (``memory.py``), and give each step's work to a
  ``Copier``.

``tests/engine/test_another_engine.py`` has the shortest connector, ``kvass.connectors.vllm`` a
whole one. ``kvass.connectors.transformers`` needs no planner and no copier: it has one request at a
time and waits for its copies.
"""
