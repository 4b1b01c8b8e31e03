from fsm_trainer.testing.plugin import conforms, gloo_processes, no_leaks

__all__ = ["conforms", "gloo_processes", "no_leaks"]
