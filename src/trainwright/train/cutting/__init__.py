"""How a global batch is cut: pure functions from lengths and ranks to the samples of each pass, with numpy alone.

Within a global batch samples may stand anywhere: the loss is a sum over its targets, divided by all of them. Which
samples a global batch has is the order's to say (`train.data.order`), and nothing here changes that.
"""
