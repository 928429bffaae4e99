"""Fine-tuning and generation as the command line does them.

corpus     private texts, chats and pairs to examples
finetune   one fine-tuning run, with checkpoints and resumption
trainer    the `Trainer` that it uses
tracking   experiment trackers
output     the output folder
generate   generation
quality    the quality that quantisation costs
"""
