// Stackful fibers: 7 instructions on x86-64, ucontext elsewhere (or with -DEMMY_EMU_UCONTEXT).
#pragma once
#include <cstddef>

#if defined(__x86_64__) && !defined(EMMY_EMU_UCONTEXT)
struct Fiber { void* sp; };
extern "C" void emmy_emu_switch(void** save_sp, void* to_sp);
inline void fiber_switch(Fiber& from, Fiber& to) { emmy_emu_switch(&from.sp, to.sp); }
inline void fiber_make(Fiber& f, char* stack, size_t bytes, void (*body)()) {
  void** sp = (void**)(stack + bytes);
  *--sp = nullptr;                             // the body's return address: it never returns; keeps the stack aligned as after a call
  *--sp = (void*)body;
  for (int i = 0; i < 6; ++i) *--sp = nullptr; // rbp, rbx, r12 to r15
  f.sp = sp;
}
#else
#include <ucontext.h>
struct Fiber { ucontext_t context; };
inline void fiber_switch(Fiber& from, Fiber& to) { swapcontext(&from.context, &to.context); }
inline void fiber_make(Fiber& f, char* stack, size_t bytes, void (*body)()) {
  getcontext(&f.context);
  f.context.uc_stack.ss_sp = stack;
  f.context.uc_stack.ss_size = bytes;
  f.context.uc_link = nullptr;
  makecontext(&f.context, body, 0);
}
#endif
