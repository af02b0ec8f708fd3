/* Launches: one test and a jump, in a form no compiler may spoil: a launch has stack arguments, and
 * they stay where the caller put them. The names that end in _slow and _target are in
 * cuda_launch.c. */

/* All reasons but LAUNCH_GRAPH: graphs are charged by their own bodies. */
#define LOOK_FURTHER 0xfffffffb

    .text
#if defined(__x86_64__)
    .macro entry name
    .globl \name
    .type \name, %function
    .p2align 4
\name:
    .cfi_startproc
    endbr64
    testl $LOOK_FURTHER, launch_reasons(%rip)
    jne \name\()_slow
    jmp *\name\()_target(%rip)
    .cfi_endproc
    .size \name, .-\name
    .hidden \name\()_slow
    .hidden \name\()_target
    .endm
#elif defined(__aarch64__)
    .macro entry name
    .globl \name
    .type \name, %function
    .p2align 4
\name:
    .cfi_startproc
    hint #34
    adrp x16, launch_reasons
    add x16, x16, :lo12:launch_reasons
    ldar w16, [x16] /* or the target could be read before LAUNCH_COLD is seen gone */
    tst w16, #LOOK_FURTHER
    b.ne 1f
    adrp x16, \name\()_target
    ldr x16, [x16, :lo12:\name\()_target]
    br x16
1:    b \name\()_slow
    .cfi_endproc
    .size \name, .-\name
    .hidden \name\()_slow
    .hidden \name\()_target
    .endm
#else
#error "x86_64 and aarch64 only"
#endif
    .hidden launch_reasons

    entry cuLaunch
    entry cuLaunchGrid
    entry cuLaunchGridAsync
    entry cuLaunchKernel
    entry cuLaunchKernel_ptsz
    entry cuLaunchKernelEx
    entry cuLaunchKernelEx_ptsz
    entry cuLaunchCooperativeKernel
    entry cuLaunchCooperativeKernel_ptsz
    entry cuLaunchCooperativeKernelMultiDevice

#if defined(__x86_64__)
    .section .note.gnu.property, "a"
    .p2align 3
    .long 4
    .long 16
    .long 5
    .asciz "GNU"
    .long 0xc0000002
    .long 4
    .long 3
    .long 0
#endif
    .section .note.GNU-stack, "", %progbits
