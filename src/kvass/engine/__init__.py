"""The parts of a connector that do not depend on the engine.

To write a connector, adapt the engine's hooks to these classes:

- Scheduler and workers: read the engine's configuration into an ``EngineSetup`` (``setup.py``), or
  into ``Inert`` if kvass does not support it. Compute the name of the weights with
  ``weights.begin``. Run every hook in a ``Boundary``, so that a defect of kvass becomes a miss.
- Scheduler: implement the protocols of ``protocols.py`` for its requests, steps and blocks, and
  call a ``Planner`` with them. Send the planner's ``StepWork`` to the workers, and the workers'
  reports to the planner. Make the engine compute the tokens of a failed load. Call
  ``Planner.weights_may_change`` before weights are replaced.
- Each worker: describe its KV pages as ``KVMemory`` (``memory.py``), and pass each step's work to
  a ``Copier``.

An engine whose unit of storage is a page with a key needs none of these: ``PageStore`` in
``pages.py`` stores and loads pages in one call each.

The shortest connector is in ``tests/engine/test_another_engine.py``, a complete one in
``kvass.connectors.vllm``. ``kvass.connectors.transformers`` uses no planner and no copier, because
it runs one request at a time and waits for its copies.
"""
