"""Fine-tuning and generation, as the commands run them. Read in this order:

corpus              makes training examples from private texts, chats and pairs
finetune            one fine-tuning run, with checkpoints and resumption
trainer             the `Trainer` of a fine-tuning run
options             options of fine-tuning and decoding
output              the output folder
generate            generation
quantisation_error  measures how quantisation changes a model's output
"""
