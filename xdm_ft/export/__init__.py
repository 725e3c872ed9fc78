"""From a trained model to one in use: model directories, loading, prediction, evaluation at a new site, ONNX.

`Parts` (parts.py) is what a model consists of. `choose.py` reads it from a run directory, `directory.py` from and to a
model directory, `hub.py` from a hub repository; `predictor.py` computes with it.
"""
