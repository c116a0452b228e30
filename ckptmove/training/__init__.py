"""Plugins for trainers, so that training saves to safetensors and resumes from there.

Each module needs its framework; nothing else of ckptmove imports them.
"""
