"""Fine-tuning and generation, as the commands run them. Read in this order:

corpus              reads private texts, chats, pairs and preferences
examples            makes training examples of them: tokens, and which are learned
finetune            one fine-tuning run, with checkpoints and resumption
trainer             TRL's trainers, with what is saved when a run ends early
options             options of fine-tuning and decoding
output              the output folder
generate            generation
quantisation_error  measures how quantisation changes a model's output
"""
