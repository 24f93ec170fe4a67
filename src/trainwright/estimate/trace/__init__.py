"""The traced step: the real step of the real model on tensors that hold nothing, to see what memory it would take.

Stands beside the rest like the workers: it imports torch, nothing imports it, and it is started as a process of its
own, `python -m trainwright.estimate.trace.answer REQUEST.json`, so that it can run with the library versions of another
environment. It needs no GPU, no weights and no network.

    request.py      what to trace                      tracker.py     every allocation and free, by part and phase
    model.py        the model with its method          engine.py      how the autograd engine really adds gradients
    quantized.py, experts.py  4-bit base models    fused.py, fused_lora.py, flash_attention.py  other kernels
    steps.py        the step of the workers, of HF     answers.py     what a step asks of data that is not there
    distributed.py  DDP and FSDP on a fake group       temporaries.py what CUDA kernels take for themselves
    fake_cuda.py, autocast.py, kernels.py, streams.py  torch.cuda on a machine without one
    memo.py           what operators give, remembered    script.py      a user's own script; values.py, weights.py,
                                                         played_gpu.py, played_group.py, saving.py serve it
    peaks_report.py   peaks and their parts             indexing.py    slices as torch 2.4 made them
    depths.py, lengthened.py  two depths instead of all, continued record by record
"""
