/* dlsym, as programs reach it. A name that cannot be in the table goes to the next dlsym by a jump
 * with the caller's return address in place, because RTLD_NEXT and RTLD_DEFAULT are answered by
 * where the caller lies. dispatch.c decides about the others. */

#if defined(__x86_64__)
    .text
    .globl dlsym
    .type dlsym, @function
    .p2align 4
dlsym:
    .cfi_startproc
    endbr64
    testq %rsi, %rsi
    je 2f
    movb (%rsi), %al
    cmpb $'c', %al
    je 1f
    cmpb $'n', %al
    je 1f
2:  movq dispatch_next_dlsym(%rip), %rax
    testq %rax, %rax
    je 1f
    jmp *%rax
1:  pushq %rdi
    .cfi_adjust_cfa_offset 8
    pushq %rsi
    .cfi_adjust_cfa_offset 8
    subq $8, %rsp
    .cfi_adjust_cfa_offset 8
    movq 24(%rsp), %rdx
    call dispatch_dlsym
    addq $8, %rsp
    .cfi_adjust_cfa_offset -8
    popq %rsi
    .cfi_adjust_cfa_offset -8
    popq %rdi
    .cfi_adjust_cfa_offset -8
    testq %rdx, %rdx
    je 3f
    ret
3:  movq dispatch_next_dlsym(%rip), %rax
    testq %rax, %rax
    je 4f
    jmp *%rax
4:  xorl %eax, %eax
    ret
    .cfi_endproc
    .size dlsym, . - dlsym

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

#elif defined(__aarch64__)
    .text
    .globl dlsym
    .type dlsym, %function
    .p2align 4
dlsym:
    .cfi_startproc
    hint #34
    cbz x1, 2f
    ldrb w9, [x1]
    cmp w9, #'c'
    b.eq 1f
    cmp w9, #'n'
    b.eq 1f
2:  adrp x16, dispatch_next_dlsym
    ldr x16, [x16, :lo12:dispatch_next_dlsym]
    cbz x16, 1f
    br x16
1:  stp x29, x30, [sp, #-32]!
    .cfi_adjust_cfa_offset 32
    .cfi_rel_offset x29, 0
    .cfi_rel_offset x30, 8
    stp x0, x1, [sp, #16]
    mov x29, sp
    mov x2, x30
    bl dispatch_dlsym
    mov x10, x0
    mov x11, x1
    ldp x0, x1, [sp, #16]
    ldp x29, x30, [sp], #32
    .cfi_adjust_cfa_offset -32
    .cfi_restore x29
    .cfi_restore x30
    cbz x11, 3f
    mov x0, x10
    ret
3:  adrp x16, dispatch_next_dlsym
    ldr x16, [x16, :lo12:dispatch_next_dlsym]
    cbz x16, 4f
    br x16
4:  mov x0, xzr
    ret
    .cfi_endproc
    .size dlsym, . - dlsym
#else
#error "dlsym entry: no code for this architecture"
#endif

    .section .note.GNU-stack, "", %progbits
