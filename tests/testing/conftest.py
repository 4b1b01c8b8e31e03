from fsm_trainer.pytest_plugin import conforms, gloo_processes, no_leaks

__all__ = ["conforms", "gloo_processes", "no_leaks"]
